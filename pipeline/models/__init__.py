"""Model families: shapes without torch (`arch`), and one plain torch reference each."""
