"""Access control: the token of the link, and requests from this server's own pages."""
