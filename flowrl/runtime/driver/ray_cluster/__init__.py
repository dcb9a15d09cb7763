"""Ray: start or join it, create the actors, and notice how its processes end."""
