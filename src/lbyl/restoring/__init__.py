"""From a plan and deliveries to new weights: rewrite, correct, recalibrate, refine."""
