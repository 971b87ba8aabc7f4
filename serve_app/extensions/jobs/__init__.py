"""Long work: jobs of many texts, spoken beside live requests and kept until they are fetched."""
