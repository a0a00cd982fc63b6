"""The tag scheduler: assigns an activity to every node by its capability tags."""
