"""Who gets in: whoever has the link, from this server's own pages."""
