"""Speech to text: sound to features, features to segments with times, segments to files."""
