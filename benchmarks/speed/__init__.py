"""How fast it is: stage by stage, against a plain forward pass, against the published loop."""
