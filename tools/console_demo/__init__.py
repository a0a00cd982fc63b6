"""Makes the recorded run of `seamflow console --demo`."""
