"""Code of users: where it is imported from, and where in it an exception was raised."""
