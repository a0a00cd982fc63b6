"""A backend of the policy: models cut into stages, which pass micro-batches on."""
