"""Measurements: workloads, what is measured of them, and reports that name the machine they were made on."""
