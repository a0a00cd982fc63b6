"""`make bench-papers`: the headlines of the three papers on real processes of this machine."""
