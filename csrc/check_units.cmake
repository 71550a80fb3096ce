# Fails when an object of csrc/units defines a weak symbol: of an inline function or a template that several objects have, the linker
# keeps any one copy, perhaps that with instructions which the processor lacks. Run with -DNM=program -DOBJECTS=file;file -P.
if(NOT NM)
  message(FATAL_ERROR "quire: no nm was found beside the compiler; it says whether kernels of one processor could be run on another")
endif()
foreach(object IN LISTS OBJECTS)
  if(NOT object MATCHES "/units/[^/]*$")
    continue()
  endif()
  execute_process(COMMAND "${NM}" -C "${object}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[0-9a-f]+ [VWu] [^\n]*" weak "${symbols}")
  list(FILTER weak EXCLUDE REGEX " DW\\.ref\\.")  # the address of a runtime's function, the same from anywhere
  if(weak)
    list(JOIN weak "\n  " lines)
    message(FATAL_ERROR "quire: ${object} defines what other objects may define too; put it into the unit's unnamed namespace:\n  ${lines}")
  endif()
endforeach()
