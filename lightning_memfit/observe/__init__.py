"""What a run holds and uses: snapshots that give everything back, and the allocator's own peak. No Lightning."""
