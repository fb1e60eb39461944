"""Which module has the rules of which ops, for all versions of torch. `nox -s known_ops` writes it."""

MODULES = {
    "shardwise_conv.convolution": """
        aten::convolution aten::convolution_backward
    """,
    "shardwise_conv.grid": """
        aten::grid_sampler_2d aten::grid_sampler_2d_backward aten::grid_sampler_3d aten::grid_sampler_3d_backward
    """,
    "shardwise_conv.planes": """
        aten::_adaptive_avg_pool2d aten::_adaptive_avg_pool2d_backward aten::_adaptive_avg_pool3d
        aten::_adaptive_avg_pool3d_backward aten::_upsample_bicubic2d_aa aten::_upsample_bicubic2d_aa_backward
        aten::_upsample_bilinear2d_aa aten::_upsample_bilinear2d_aa_backward aten::_upsample_lanczos2d_aa
        aten::_upsample_lanczos2d_aa_backward aten::_upsample_nearest_exact1d aten::_upsample_nearest_exact1d_backward
        aten::_upsample_nearest_exact2d aten::_upsample_nearest_exact2d_backward aten::_upsample_nearest_exact3d
        aten::_upsample_nearest_exact3d_backward aten::adaptive_max_pool2d aten::adaptive_max_pool2d_backward
        aten::adaptive_max_pool3d aten::adaptive_max_pool3d_backward aten::avg_pool2d aten::avg_pool2d_backward
        aten::avg_pool3d aten::avg_pool3d_backward aten::max_pool2d_with_indices
        aten::max_pool2d_with_indices_backward aten::max_pool3d_with_indices aten::max_pool3d_with_indices_backward
        aten::reflection_pad1d aten::reflection_pad1d_backward aten::reflection_pad2d aten::reflection_pad2d_backward
        aten::reflection_pad3d aten::reflection_pad3d_backward aten::replication_pad1d
        aten::replication_pad1d_backward aten::replication_pad2d aten::replication_pad2d_backward
        aten::replication_pad3d aten::replication_pad3d_backward aten::upsample_bicubic2d
        aten::upsample_bicubic2d_backward aten::upsample_bilinear2d aten::upsample_bilinear2d_backward
        aten::upsample_linear1d aten::upsample_linear1d_backward aten::upsample_nearest1d
        aten::upsample_nearest1d_backward aten::upsample_nearest2d aten::upsample_nearest2d_backward
        aten::upsample_nearest3d aten::upsample_nearest3d_backward aten::upsample_trilinear3d
        aten::upsample_trilinear3d_backward
    """,
    "shardwise_conv.shuffle": """
        aten::channel_shuffle aten::col2im aten::im2col aten::pixel_shuffle aten::pixel_unshuffle
    """,
    "shardwise_conv.unpooling": """
        aten::fractional_max_pool2d aten::fractional_max_pool2d_backward aten::fractional_max_pool3d
        aten::fractional_max_pool3d_backward aten::max_unpool2d aten::max_unpool3d
    """,
}
