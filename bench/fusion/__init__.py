"""Fused pipelines of actor and critic next to one after the other."""
