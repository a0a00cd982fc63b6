"""Where what is shown comes from: the services of a run, or what they left in its folder."""
