# This machine's own compiler; the AMX unit as it ships, its tile instructions answered by tiles.cpp.
add_compile_definitions(QUIRE_EMULATE_TILES)
set(QUIRE_EMULATED tiles.cpp)
set_source_files_properties(tiles.cpp PROPERTIES COMPILE_OPTIONS "-march=x86-64-v3")
