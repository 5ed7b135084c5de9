"""What users call: chains, runs, the doctor."""
