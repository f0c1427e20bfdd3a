"""What all tables share: networks with their data, results, tables, plots and parallel jobs."""
