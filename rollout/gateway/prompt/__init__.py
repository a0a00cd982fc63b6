"""From a Generate request to token ids: checks, chat template, retokenization."""
