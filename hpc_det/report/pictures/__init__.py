"""Pictures of facts, as SVG text that is safe to embed in a page. Colours are classes defined in page.css."""
