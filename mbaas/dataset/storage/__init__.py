"""Access to the files that contain samples: locations, reads, retries and errors."""
