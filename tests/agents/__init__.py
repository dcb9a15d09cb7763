"""The endpoint and the programs of agents, chat templates and the replies that are read by them."""
