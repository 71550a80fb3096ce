# This machine's own compiler; the AVX-512 units and the AMX unit for processors with AVX2 alone: two halves for each vector (avx512.h),
# tile instructions answered by tiles.cpp.
include("${CMAKE_CURRENT_LIST_DIR}/amx.cmake")
add_compile_definitions(QUIRE_EMULATE_AVX512)

# The units' flags with AVX2 in the place of AVX-512, and without optimizations that take the compiler minutes.
function(quire_units_of_halves)
  foreach(unit IN LISTS QUIRE_BUILT_UNITS)
    get_target_property(flags quire_${unit} COMPILE_OPTIONS)
    if("-march=x86-64-v4" IN_LIST flags)
      list(REMOVE_ITEM flags -mavx512vnni -mprefer-vector-width=512)
      list(TRANSFORM flags REPLACE "^-march=x86-64-v4$" "-march=x86-64-v3")
      list(TRANSFORM flags REPLACE "^-mavx512bf16$" "-DQUIRE_EMULATE_BF16")
      set_target_properties(quire_${unit} PROPERTIES COMPILE_OPTIONS "${flags};-Og")
    endif()
  endforeach()
endfunction()
cmake_language(DEFER CALL quire_units_of_halves)
