"""Steps of models and batches of real size, computed without a GPU."""
