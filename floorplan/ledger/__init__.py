"""What one step keeps: fakes, runs, verdict, figures, and the report on them."""
