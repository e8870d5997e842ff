"""Ways to run numbered commands somewhere: here, in a job array, on a Ray cluster."""
