"""The HTTP gateway: rollouts for agents that speak the wires of OpenAI or Anthropic."""
