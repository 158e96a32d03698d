"""Recipes: what is trained.

nmt/        multilingual translation: data, Transformer, beam search, scores
tagging/    parts of speech and named entities with Hugging Face encoders
"""
