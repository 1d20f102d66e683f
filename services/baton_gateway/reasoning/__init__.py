"""The thoughts that models write before their answers."""
