"""The tag scheduler: nodes say what they can do, it says what they do now."""
