"""What every node process has: sockets, leases, page accounting, steps, administration."""
