"""The parts of a room's sender and receiver that backends share."""
