"""Values in and out of a prepared model: loading into the tiers, exporting what others read."""
