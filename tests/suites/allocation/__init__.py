"""A running training job whose nodes move between training and generation."""
