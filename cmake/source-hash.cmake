# cmake -DSCRIPT=scripts/source-hash.sh -DOUT=header -P source-hash.cmake: writes OUT if the hash changed.
cmake_minimum_required(VERSION 3.21)
execute_process(COMMAND sh ${SCRIPT} OUTPUT_VARIABLE hash OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
file(CONFIGURE OUTPUT ${OUT} CONTENT "#define AR_SOURCE_HASH ${hash}\n")
