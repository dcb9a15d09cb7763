"""Nodes that compute with a fixed or second model: reference, critic, teacher."""
