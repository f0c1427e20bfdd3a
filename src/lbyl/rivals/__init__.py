"""What `echo` is compared with: methods of others, and the errors that the paper goes by."""
