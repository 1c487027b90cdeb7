"""What holds one layer's keys: plain, a ring, packed in few bits."""
