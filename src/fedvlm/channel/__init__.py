"""The channel between client and server: clip, noise, quantise, verified sum, validation and outliers."""

from fedvlm.channel.settings import Channel as Channel
