"""What is installed: the code of the services, and the packages that an extra names."""
