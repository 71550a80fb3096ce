# This machine's own compiler; the AVX-VNNI unit in the encoding that AVX-512 gives the same instruction, for processors without AVX-VNNI.
add_compile_definitions("QUIRE_VNNI_ENCODING=\"%{evex%}\"")
