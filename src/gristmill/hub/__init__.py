"""The Hugging Face Hub, files from the network, and objects of stores elsewhere."""
