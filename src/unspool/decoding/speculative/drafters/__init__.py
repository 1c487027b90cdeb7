"""What guesses tokens: one small protocol, one file for each drafter."""
