"""The tool loop: a stepped environment made from configuration, without a class of the user's."""
