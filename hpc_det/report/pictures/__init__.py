"""Pictures of facts: SVG as text that is safe to put into a page. Colours are classes, which page.css gives meaning."""
