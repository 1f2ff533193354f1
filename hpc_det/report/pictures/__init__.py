"""Pictures of the facts, as SVG text that is safe to embed in a page. Colours are CSS classes of page.css."""
