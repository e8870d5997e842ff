"""The Hugging Face Hub, and files from the network: a thin layer over huggingface_hub."""
