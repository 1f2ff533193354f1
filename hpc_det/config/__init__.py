"""What the user asked for: composed, merged with the site's template, validated; every value with its origin."""
