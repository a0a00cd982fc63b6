"""HTTP servers that the HTTP gateway is compared with; each listens on the port in `argv[1]`."""
