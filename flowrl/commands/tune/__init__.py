"""`flowrl tune`: measures short runs, predicts the step of each placement and verifies the best."""
