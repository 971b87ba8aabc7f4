"""Jobs: many texts, synthesized in the background of live requests and kept until they are fetched."""
