# The native code's files and flags, for the extension (CMakeLists.txt) and for the program that emulators run (csrc/emulate).
# Every .cpp of csrc/ is built once; csrc/units/unit_<isa>.cpp holds the kernels, once per instruction set.
set(QUIRE_CSRC "${CMAKE_CURRENT_LIST_DIR}")
file(GLOB QUIRE_SOURCES CONFIGURE_DEPENDS "${QUIRE_CSRC}/*.cpp")
set(QUIRE_UNITS "")
set(QUIRE_DEFINITIONS "")

# quire_unit(NAME FLAG...): the unit csrc/units/unit_NAME.cpp, with these flags.
macro(quire_unit name)
  list(APPEND QUIRE_UNITS "${QUIRE_CSRC}/units/unit_${name}.cpp")
  set_source_files_properties("${QUIRE_CSRC}/units/unit_${name}.cpp" PROPERTIES COMPILE_OPTIONS "${ARGN}")
endmacro()

# quire_load_unit(NAME FLAG...): csrc/units/load_NAME.cpp, what several units share at a load, with these flags.
macro(quire_load_unit name)
  list(APPEND QUIRE_UNITS "${QUIRE_CSRC}/units/load_${name}.cpp")
  set_source_files_properties("${QUIRE_CSRC}/units/load_${name}.cpp" PROPERTIES COMPILE_OPTIONS "${ARGN}")
endmacro()

quire_unit(portable)
quire_load_unit(portable)
string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" QUIRE_PROCESSOR)
if(QUIRE_PROCESSOR MATCHES "x86_64|amd64")
  set(QUIRE_DEFINITIONS QUIRE_X86)
  # GCC 12's own intrinsics headers trip the warnings about uninitialized values.
  set(QUIRE_AVX512 -march=x86-64-v4 -mavx512vnni -mprefer-vector-width=512 -Wno-uninitialized -Wno-maybe-uninitialized)
  quire_unit(avx2 -march=x86-64-v3)
  quire_load_unit(avx2 -march=x86-64-v3)
  quire_unit(avxvnni -march=x86-64-v3 -mavxvnni)
  quire_unit(avx512vnni ${QUIRE_AVX512})
  quire_load_unit(avx512 ${QUIRE_AVX512})
  quire_unit(avx512 ${QUIRE_AVX512} -mavx512bf16)
  quire_unit(amx ${QUIRE_AVX512} -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16)
elseif(QUIRE_PROCESSOR MATCHES "aarch64|arm64")
  set(QUIRE_DEFINITIONS QUIRE_ARM64)
  quire_unit(neon -march=armv8.2-a+dotprod)
  quire_load_unit(neon -march=armv8.2-a+dotprod)
  quire_unit(neon_i8mm -march=armv8.2-a+dotprod+i8mm)
endif()

function(quire_options target)
  target_include_directories(${target} PRIVATE "${QUIRE_CSRC}")
  target_link_libraries(${target} PRIVATE Threads::Threads)
  # libgcc's own conversions of half floats, before the shared library's, which has them since GCC 12.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_link_libraries(${target} PRIVATE gcc)
  endif()
  target_compile_definitions(${target} PRIVATE ${QUIRE_DEFINITIONS})
  target_compile_features(${target} PRIVATE cxx_std_20)
  # The order of every floating-point sum is part of the result: no fast math, and no contraction the source does not ask for.
  target_compile_options(${target} PRIVATE -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra -Wvla
    -Wno-psabi -Werror=return-type -Werror=vla -Werror=sign-compare -Werror=uninitialized)
endfunction()
