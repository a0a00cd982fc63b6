"""What the files of a Hugging Face model folder say, read without loading the model."""
